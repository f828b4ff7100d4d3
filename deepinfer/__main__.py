"""`python -m deepinfer` is the `deepinfer` command."""

from deepinfer.cli.main import main

main()
