from tests.jobs.kinds_of_tests import Plain

KIND = Plain()
