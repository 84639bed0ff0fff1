"""How a model trains: from a config to steps, evaluations, checkpoints and records.

assemble.py              the things that train, made of a config: dataset, model, learner, loaders
built_model.py           the model before it is parallelized
loop.py, turns.py        one optimizer step; of modules that learn by turns, several
passes.py                the batches of a step, and the time spent waiting for them
trainer.py               the loop around the steps: when to evaluate, save, log and stop
batch_finder.py, learning_rate_finder.py
                         what a run looks for before its first step
memory.py                the peak of memory, and how much a rank may use
balance.py               the task with its loss, class weights, weights of samples
evaluate.py, evaluation.py, scores.py, evaluation_files.py
                         every image once, exactly; the result, its table of classes, its files
optimizer.py, own_optimizer.py, schedule.py, arithmetic.py, trust_ratio.py, weight_average.py
                         optimizers, a user's own, learning rates, precision, sharded LARS and LAMB, averages of weights
given.py                 objects that a Python program passes in place of names
batch_sharding.py        which part of a batch a rank reads
agreed.py                which images of a batch all ranks of a copy could read
checkpoint.py, checkpoint_directory.py, manifest.py, tensors.py, tree_json.py
                         checkpoints: saving, files and folders, hashes, tensors, plain values
state.py, resume.py      what a checkpoint has of a run, and how a run under another plan loads it
run_folder.py, record.py, scalars.py, terminal.py, thumbnails.py
                         what a run writes and prints
disk.py, interrupt.py    a full disk; a signal
guard.py, guarding.py    NaN, Inf and spikes: which steps are refused, and what the run does then
refused_batch.py         the batches of refused steps, kept to be run again
checksums.py             whether replicas hold the same bits
replay.py, non_finite.py a step that runs again; the module that first makes NaN
streaming.py             a recipe's stream
"""
