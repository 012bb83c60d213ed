from tests.jobs.kinds_of_tests import Watched

KIND = Watched()
