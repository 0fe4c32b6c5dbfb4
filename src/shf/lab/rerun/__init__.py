"""The paper, rerun: a queue of runs at its settings, its claims, and the page that holds them against the records.

`python -m shf.lab.rerun continue` works on the queue, `python -m shf.lab.rerun draw` makes the page from the records.
"""
