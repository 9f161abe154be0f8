"""Ranks on several hosts, which are network namespaces of this one."""
