"""The scheduler's decisions as data: the event schema `atom.sched/1`."""
