"""Tests of one module each: ``unit/ROOM/test_X.py`` tests ``zero_opt/ROOM/X.py``."""
