"""The command in the process of a test, for all tests of verbs."""

from tests.test_cli import invoke as invoke
