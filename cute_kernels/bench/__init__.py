"""`python -m cute_kernels.bench`: every kernel against a floor and against named peers, after a correctness gate.

    cases.py       a case: its shape, its bytes and FLOP, its inputs       suites.py        which cases a suite holds
    contestants.py ours and plain torch   flashinfer_mla.py  FlashInfer    correctness.py   the gate
    timing.py      CUDA graphs, interleaved; the ceilings of the machine   run.py           a case from gate to figures
    machine.py     what it ran on                                          report.py        JSON and Markdown

A new case is a line in `suites.py`, a new peer one in `contestants.py`.
"""
