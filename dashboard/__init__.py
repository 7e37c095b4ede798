"""Every face of the service: the browser, the pull request and the terminal."""
