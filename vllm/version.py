"""The version of the package, as a string and as a tuple."""

__version__ = "0.9.2+py23"
__version_tuple__ = (0, 9, 2, "py23")
