"""The whole product with real workers, brokers and databases: what is caused is counted against what is recorded."""
