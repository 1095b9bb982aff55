@rem Checks FLASH_ATTN_BACK against float64: see oracle, which does the same for other shells.
@set PYTHONPATH=%~dp0..;%PYTHONPATH%
@py -3 "%~dp0..\pyharness\base\build.py" oracle %*
