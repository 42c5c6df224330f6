"""What `bench train` is made of: tasks, contenders, one run, the results of many, and their report."""
