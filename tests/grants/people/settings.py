"""Settings of a host project with the user model that PEOPLE_USER_MODEL names."""

import os

from tests.settings import *  # noqa: F403
from tests.settings import INSTALLED_APPS

INSTALLED_APPS = [*INSTALLED_APPS, "tests.grants.people"]
AUTH_USER_MODEL = os.environ["PEOPLE_USER_MODEL"]
