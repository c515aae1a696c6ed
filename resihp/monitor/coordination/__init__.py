"""The rooms of the coordinator: each phase and each concern of a job, all of them pure."""
