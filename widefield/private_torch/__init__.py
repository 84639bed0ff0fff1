"""What this package uses of torch that torch does not promise: each name with what it is for.

Everywhere else these names are imported from here, under a name without an underscore; a test finds any other underscored
part of torch.  A new torch may rename them or change what they do, so `tests/test_private_torch.py` asks each for what is
relied on.

    tensors.py         memory and views of tensors, and wrapper subclasses
    autograd.py        the backward that is running
    dispatcher.py      operators, dispatch keys and modes
    decompositions.py  torch's definitions of operators by others
    fake_tensors.py    tensors without data, and functionalization
    modules.py         what an nn.Module holds, and base classes of layers
    pytree.py          nested arguments
    loaders.py         workers of a DataLoader
    process_groups.py  torch.distributed's own registry of groups
    pipelining.py, dtensor.py
                       parts of torch.distributed that take long to import; whoever uses them pays for it

Names of operators, as `aten._softmax`, are not here: the dispatcher hands them out, and ops/ is about them.
Imports torch alone.
"""

OLDEST, NEWEST = (2, 11), (2, 15)
"""The minor versions of torch with which the tests have passed; pyproject.toml allows none below or above."""

OVERRIDDEN = {
    "PlannedGroup._allgather_base": "torch's collectives before 2.14 call it, as all_gather_single now",
    "PlannedGroup._get_backend": "batch_isend_irecv asks it whether a backend sends several messages as one",
    "PlannedGroup._reduce_scatter_base": "torch's collectives before 2.14 call it, as reduce_scatter_single now",
    "SyncBatchNorm._check_input_dim": "torch's BatchNorm asks it whether an input has dims that the layer takes",
}
"""Private methods of torch's classes that classes of this package define anew, and when torch calls them."""
