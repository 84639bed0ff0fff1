"""Faults on purpose: a rank dies, sleeps, runs out of memory or sends what it should not, at a chosen step and place.

    WIDEFIELD_FAULTS="rank=1 step=7 phase=forward kind=kill" widefield train ...

    fault.py      what a fault is, and its text
    injector.py   which fault is due now; what it does; the line that it leaves in the run's record
    tensors.py    numbers made wrong: NaN, a flipped bit, another shape
    points.py     the places of a run where faults come in

Nothing of this is imported by a run that asks for no fault.  `planted` replaces functions of the run by ones that ask the
injector first, and puts them back.
"""
