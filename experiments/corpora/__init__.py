"""A corpus of real English and code, built out of software packages."""
