"""Predictions of a run's model for images: files of a command line, or objects of a Python program.

inputs.py finds the files and the names of their answers; transformed.py has the images as the model gets them, and the way back
to their own pixels; answers.py runs the model; labels.py writes what it says of pixels; journal.py remembers what is done;
table.py writes predictions.csv and predictions.json; session.py does it all, on every rank.
"""
