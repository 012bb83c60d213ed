#!/usr/bin/env python
"""The command line of the console's own project."""

import os
import sys

# Before anything else is imported: what comes next does not even parse on an old Python.
if sys.version_info < (3, 11):  # noqa: UP036
    sys.exit("opsconsole needs Python 3.11 or newer, and this is Python %d.%d." % sys.version_info[:2])  # noqa: UP031

from django.core.exceptions import ImproperlyConfigured
from django.core.management import execute_from_command_line

if __name__ == "__main__":
    os.environ.setdefault("DJANGO_SETTINGS_MODULE", "opsconsole.settings.base")
    try:
        execute_from_command_line(sys.argv)
    except ImproperlyConfigured as error:
        sys.exit(str(error))
