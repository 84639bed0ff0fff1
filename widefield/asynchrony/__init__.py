"""A run with parameter servers: the last ranks hold the weights and the optimizer, all others are workers.

    worker:  asks; gets (version, share, weights); reads the share's samples; pushes (gradient, change of running statistics)
    server:  updates with each gradient as agreement.kind says, evaluates, saves; hands out what a dead worker had once more

Of several servers each holds an even part, and the first leads: it hands out shares, orders each update of the others in the
order of its log, and collects their parts before it evaluates or saves.

The first server is a run of one rank in all that concerns files: its trainer is the usual one, whose steps wait for the samples
of a step to be learned from.  Before an evaluation or a save it hands out no share of a later step, so that its weights have
learned from the samples of so many whole steps, and from no others.  So a checkpoint is that of any run, and any plan goes on
with it.

    checks           what a server refuses
    flat_model       weights, gradients and statistics as one tensor each
    weight_parts     a part of them, and of the optimizer's state
    samples          which samples a share has
    messages         what is in the messages, and their bytes; part_messages: in those to and from further servers
    event_file       events.jsonl, from which the simulator computes the run again
    held_weights     what a server holds, and how it steps
    weights          the first server's updates, and its orders to the others
    attendance       which workers hang
    server           the trainer of the first server's rank; further_servers: its way to the others
    part_server      the loop of a further server
    asking           how ranks that ask another one fail, and end
    server_links     a worker's way to all servers
    worker           the loop of a worker
    ranks            who does which

Workers that average in pairs (AD-PSGD) have weights of their own, and the last rank keeps the account of samples and the log:

    pair_messages  what is in their messages, with that rank and with each other
    pair_worker    the loop of a worker, and the thread that answers others
    pair_journal   what workers told, in an order in which it may have happened
    pair_keeper    the trainer of the rank that keeps the account
    silence        ends a run in which all workers hang
"""
