"""The command line: a file per verb, which parses, calls one public function and prints."""
