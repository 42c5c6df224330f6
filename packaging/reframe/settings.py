"""ReFrame's settings for one machine without a batch system: ranks by mpirun. Your site has settings of its own."""

site_configuration = {
    "systems": [
        {
            "name": "here",
            "hostnames": [".*"],
            "partitions": [{"name": "local", "scheduler": "local", "launcher": "mpirun", "environs": ["builtin"]}],
        }
    ]
}
