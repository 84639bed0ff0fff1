"""`widefield doctor`: what would stop or slow a run here, before it starts; what did, from its logs, afterwards.

    finding.py   what a check found: ok, warn, bad or not here, with a figure and a remedy
    place.py     what a check may look at: the ranks, the recipe, the run folder, the machines that were named
    checks/      before: one file per check
    checkup.py   runs them on all ranks; the table
    evidence.py  the files of a run as text: record, logs, tracebacks, batch scripts
    rules/       after: one file per failure, with what it looks like, its cause, its remedy, and what is no cure
    findings.py  which failures the files tell of, the cause before what follows from it

Checks look at every rank and are judged on rank 0; a check's verdict depends on nothing but what the ranks have seen.  Logs are
read as text: nothing in them runs.
"""
