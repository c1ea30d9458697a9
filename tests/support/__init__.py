"""What tests share: made-up runs, drivers, projects and workers whose behaviour is known."""
