@rem Runs every check and test: see test, which does the same for other shells.
@set PYTHONPATH=%~dp0..;%PYTHONPATH%
@py -3 "%~dp0..\pyharness\base\build.py" test %*
