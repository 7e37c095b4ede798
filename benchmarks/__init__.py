"""The asv suites. Module, class and method names are the identity of the recorded history."""
