"""The command line in this process."""

from slipstream.tests.unit.cli.conftest import cli, store  # noqa: F401
