from tests.jobs.kinds_of_tests import Outside

KIND = Outside()
