"""The scripts that made the golden files need packages that the tests do not."""

collect_ignore_glob = ["make_*.py"]
