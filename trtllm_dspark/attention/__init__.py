"""Attention of a block over its paged context: one signature, several backends, and the policy that picks one.

A backend is trusted after its self-check on the device at hand; one of its schedules that nobody has run on that device, after
a trial in a process of its own (`schedules`, `trial_process`, `trial`).
"""
