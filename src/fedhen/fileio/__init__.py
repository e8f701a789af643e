"""Reading and writing files safely: whole files, locks, input that is not trusted, work in the background."""
