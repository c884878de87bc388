"""Attention of a block over its paged context: one signature, several backends, and the policy that picks one."""
