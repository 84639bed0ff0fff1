"""Every message: who the ranks are, the groups they talk in, and what they send.

    mesh.py            the ranks and their axes; join and leave
    meeting.py         the store that they meet at
    devices.py         the device of a rank, and what carries its messages
    process_groups.py  which groups of ranks a mesh wants
    collectives.py     collectives by the names that this version of torch knows
    point_to_point.py  messages from one rank to another, through the host's memory where gloo carries them between GPUs
    halo.py            pixels from the ranks that hold them to those that want them, with its adjoint
    failure.py         an error of one rank ends all of them, in words
    stall_watch.py     which rank is missing, where a step does not end
    timeline.py        how long a step's collectives took

Imports integers (geometry), the plan and plain values alone.
"""
