"""`python -m cute_kernels.bench`: every kernel against a floor and against named peers, after a correctness gate.

    cases.py       a case: its shape, its bytes and FLOP, its inputs       suites.py        which cases a suite holds
    contestants.py ours and plain torch   flashinfer_mla.py  FlashInfer    flash_mla.py     FlashMLA, on Hopper
    paged.py       what peers are given that know no block                 correctness.py   the gate
    timing.py      CUDA graphs, interleaved; the ceilings of the machine   run.py           a case from gate to figures
    machine.py     what it ran on         sensors.py  clock and power      report.py        JSON and Markdown
    targets.py     what is asked of ours, beside what was found            plot.py          the sweep over the context as a PNG

A new case is a line in `suites.py`, and so is a target; a new peer is one in `contestants.py`.
"""
