"""The command line: a file a command. Nothing is measured here."""
