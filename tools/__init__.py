"""Scripts for developers; no part of the installed package."""
