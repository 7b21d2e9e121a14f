"""Programs of Legato as forks of a process that has imported them, which saves their imports."""
