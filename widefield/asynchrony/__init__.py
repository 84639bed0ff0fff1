"""A run with a parameter server: the last rank holds the weights and the optimizer, all others are workers.

    worker:  asks; gets (version, share, weights); reads the share's samples; pushes (gradient, change of running statistics)
    server:  updates with each gradient as agreement.kind says, evaluates, saves; hands out what a dead worker had once more

The server is a run of one rank in all that concerns files: its trainer is the usual one, whose steps wait for the samples of a
step to be learned from.  Before an evaluation or a save it hands out no share of a later step, so that its weights have learned
from the samples of so many whole steps, and from no others.  So a checkpoint is that of any run, and any plan goes on with it.

    checks      what a server refuses
    flat_model  weights, gradients and statistics as one tensor each
    samples     which samples a share has
    messages    what is in the messages, and their bytes
    event_file  events.jsonl, from which the simulator computes the run again
    weights     the server's updates
    server      the trainer of the server's rank
    worker      the loop of all other ranks
    silence     ends a run in which workers hang
    ranks       who does which

Workers that average in pairs (AD-PSGD) have weights of their own, and the last rank keeps the account of samples and the log:

    pair_messages  what is in their messages, with that rank and with each other
    pair_worker    the loop of a worker, and the thread that answers others
    pair_journal   what workers told, in an order in which it may have happened
    pair_keeper    the trainer of the rank that keeps the account
"""
