"""PTX and kernels that the tests and the campaigns run."""
