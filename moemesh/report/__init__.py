"""Pictures and the report page, from trace alone."""
