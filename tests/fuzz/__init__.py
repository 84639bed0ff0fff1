"""Random programs under random plans against one device.  `python -m tests.fuzz --seed 7 --minutes 10` says what differs."""
