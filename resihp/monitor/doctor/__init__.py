"""`resihp doctor`: what is wrong with a machine, or with a job on it, before it costs a job."""
