"""Newer public paths; each file says where its names live."""
