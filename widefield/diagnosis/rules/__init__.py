"""Failures that doctor knows from logs, one per file.  Each file defines

- `TITLE`: what has happened, as a person would say it;
- `KIND`: `cause`; `inferred`, from who waits for whom, where no cause was found; `consequence`, what another failure leaves in
  most logs; `notice`, which stops nothing;
- `PATTERNS`: regular expressions, the first place where one fits is what doctor concludes from; or, where more than one line
  has to be seen, `find(evidence)`, which returns a Sighting or None;
- `CAUSE` and `REMEDY`: sentences; `WRONG`: what is often done, and why it is no cure; `SOURCE`: where it is known from;
- `IS_WEAK`, of a cause that may be another's consequence: it is told where no other cause was found;
- `ORDER`, of what is inferred: the first that fits is told, lower is asked earlier;
- `CASES`: (a log, a part of the line that must be named, or None where this file must not speak).  The logs have the form of
  those that PyTorch, NCCL and Slurm write; what tests/diagnosis/logs/ has was written by real runs.
"""
