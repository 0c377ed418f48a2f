"""The command that proves layouts: every setting against one device."""
