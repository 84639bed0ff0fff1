"""All communication between ranks: the mesh, its process groups, and the messages.

    mesh.py            the ranks and the axes of the mesh; join and leave
    world.py           which rank this process is
    meeting.py         the store of the rendezvous
    keepalive.py       connections to a machine that is gone end with an error
    gloo_threads.py    gloo's threads take no core from those that compute
    cores_of_ranks.py  ranks that compute on the same cores divide them
    meeting_file.py    a file that all machines share as the place to meet
    coming_back.py     a rank that was started again meets one that lives
    roll_call.py       are all ranks here, once each, of this job, with the same versions
    interfaces.py      network interfaces: of messages, and where this process listens
    devices.py         the device of a rank, and the backend of its messages
    process_groups.py  the process groups that a mesh needs
    collectives.py     collectives under the same name in every version of torch
    link_times.py      how long messages take between the ranks that there are
    point_to_point.py  send and receive, through the host's memory where gloo serves GPUs
    halo.py            pixels from the ranks that own them to the ranks that want them, and sums over ranks
    failure.py         an error on one rank ends the run on all ranks, with its reason
    attempt.py         work that a rank may give up, without an end of the run
    stall_watch.py     which rank is missing when a step does not end, and which is slow; a run that hangs is ended
    stand.py, verdict.py
                       what a rank reports of itself, and what follows from all reports
    fingerprints.py    the first steps' collectives, compared between ranks
    flight_recorder.py, message_tally.py
                       which collectives, and which messages between two ranks, a rank has begun
    at_exit.py         threads of messages end before the interpreter does
    timeline.py        profiler traces, and how long a step's messages took

Imports only geometry, plans and plain values.
"""
