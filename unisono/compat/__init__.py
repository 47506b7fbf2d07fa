"""Names of other frameworks, over this one."""
