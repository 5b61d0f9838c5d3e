"""What compute is asked for, and the clients that get it. Plain Python, no Prefect."""
