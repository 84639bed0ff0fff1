"""How a model trains: from a config to steps, evaluations, checkpoints and records.

    assemble.py              the things that train, made of a config: dataset, model, learner, loaders
    loop.py                  one optimizer step
    trainer.py               the loop around the steps: when to evaluate, save, log and stop
    evaluate.py              every image once, exactly
    optimizer.py, schedule.py, arithmetic.py, trust_ratio.py, weight_average.py
                             optimizers, learning rates, precision, LARS and LAMB over parts, averages of weights
    batch_sharding.py        which part of a batch a rank reads
    agreed.py                what of a batch all ranks of a copy could read
    checkpoint.py, checkpoint_directory.py, manifest.py, tensors.py, tree_json.py
                             checkpoints: saving, what lies on the disk, hashes, tensors, plain values
    state.py, resume.py      what a checkpoint holds of a run, and how another plan takes it up
    run_folder.py, record.py, scalars.py, terminal.py, thumbnails.py
                             what a run writes and says
    disk.py, interrupt.py    a full disk; a signal
    streaming.py             a recipe's stream

Imports the rooms that run a model, tasks and data.
"""
