"""What each command does: parse, call, print. Imports that take long wait for their command."""
