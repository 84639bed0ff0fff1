"""What doctor looks at before a run, one file per check.  Each file defines

- `ORDER`: its place in the table, lower is earlier; `TITLE`: its name there;
- `MESSAGES`: whether looking takes messages between ranks: such checks run after the ranks have met, on all of them;
- `look(surroundings)`: what this rank sees, as a dict of plain values;
- `judge(facts)`: a Finding, from what all ranks saw, each with its `rank` and `host`.  It looks at nothing else, so that every
  verdict can be tested;
- `CASES`: (facts of the ranks, the state, a part of the figure or of the remedy), with some that are not ok.
"""
