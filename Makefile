# Every target is a thin call of a script. Only lib/kconf reads .config; including it here would expand $ and #.
# Each target has a row in scripts/targets with the variables that it takes; make refuses others before it starts.

# Names of the command-line variables, to tell them from environment variables. Loop variables are called =, the one
# name that a user cannot set; what a user must not replace says override.
override KCONFIG_MAKE_VARIABLES := $(foreach =,$(.VARIABLES),$(if $(filter command,$(origin $=)),$=))
override PLACES := O VENV PYTHON KCONFIG_CONFIG
override define newline


endef
# Check these variables, and those used from the environment, before anything expands them: make would expand a dollar
# sign and run a shell function, a line break would end a recipe, and a tilde that the shell has not expanded would
# become a directory of that name.
$(foreach =,$(PLACES) V $(KCONFIG_MAKE_VARIABLES) $(if $(filter environment%,$(origin MAKECMDGOALS)),MAKECMDGOALS),\
	$(if $(findstring $$,$(subst $$$$,,$(value $=))),\
		$(error $= has a dollar sign, which make takes for itself; write $$$$ for each))\
	$(if $(findstring $(newline),$(value $=)),$(error $= has a line break; it is a single line))\
	$(if $(filter $(PLACES) FILE DIRECTORY OUT EXTERNAL,$=),$(if $(filter ~%,$(firstword $(value $=))),\
		$(error $= begins with a tilde that the shell did not replace; write the whole path, or ./~))))

# With -e any variable of the environment would replace one of this file, and be expanded.
$(if $(findstring e,$(filter-out --%,$(firstword -$(MAKEFLAGS)))),\
	$(error make -e is not supported: give variables on the command line))

PYTHON ?= python3
VENV ?= .venv
GOMP_SPINCOUNT ?= 10000
KCONFIG_CONFIG ?= .config
config_is_named := $(filter-out file,$(origin KCONFIG_CONFIG))
override of_environment := $(strip $(foreach =,$(PLACES) V,$(if $(filter environment,$(origin $=)),$=)))
# A relative path is below O=, as in the kernel. An outer make may already have put it there.
override KCONFIG_CONFIG := $(if $(O),$(if $(filter /% $(O)/%,$(firstword $(KCONFIG_CONFIG))),,$(O)/))$(or $(KCONFIG_CONFIG),.config)

# Make passes its command-line variables to every program byte for byte (a dollar sign is written $$).
export KCONFIG_MAKE_VARIABLES KCONFIG_CONFIG
# How long waiting threads spin before they sleep. By default GNU OpenMP spins for milliseconds, which takes CPU time
# from other programs on a shared machine, and so from the threads that the waiting ones need.
export GOMP_SPINCOUNT
# O= is the directory of .config and everything made from it; V=1 also shows where values come from.
export KCONFIG_OUTPUT := $(or $(O),.)
export KCONFIG_VERBOSE := $(V)

$(if $(wildcard scripts/kconf.py),,$(error make works in the source tree: make -C DIRECTORY))
# Make cannot handle a space in the file names of the environment.
$(if $(word 2,$(VENV)),$(error VENV cannot have a space in its name))

quiet := $(if $(filter 1,$(V)),,@)
override quote = '$(subst ','\'',$(1))'
$(if $(and $(O),$(findstring $(O),$(wildcard $(subst $() ,\ ,$(O))))),$(if $(wildcard $(subst $() ,\ ,$(O)/.)),,$(error O=$(O) is not a folder)))
# The folder of EXTERNAL=, or the one that `kconf.py external` has kept; EXTERNAL= forgets it. new-% may make it first.
export ANNEAL_EXTERNAL := $(if $(filter command,$(origin EXTERNAL)),$(EXTERNAL),$(file <$(or $(O),.)/.external))
override PY := $(if $(VENV),$(VENV)/bin/python,$(PYTHON))
override GOALS := $(or $(MAKECMDGOALS),all)
RUN_FOLDER := $(if $(O),$(O)/runs,runs)
RUN_PY := $(quiet)$(PY)
KCONF := $(RUN_PY) scripts/kconf.py
verbose := $(if $(filter 1,$(V)),--verbose)
keep_external = $(if $(filter command,$(origin EXTERNAL)),$(KCONF) external)
TRAIN := $(RUN_PY) -m train --runs $(call quote,$(RUN_FOLDER)) $(verbose)
CLUSTER := $(RUN_PY) -m scripts.cluster --runs $(call quote,$(RUN_FOLDER)) --config $(call quote,$(KCONFIG_CONFIG))
# These count only on the command line: NAME and the like mean other things in the environment.
given = $(if $(filter command,$(origin $(1))),$(if $($(1)),$(call quote,$($(1)))))
# Options for those of the words option=VARIABLE[=GOAL...] whose variable is given, for these goals alone. Values follow
# an equals sign, and other words come last, because they may begin with a minus.
options = $(foreach =,$(1),$(call option,$(word 1,$(subst =, ,$=)),$(word 2,$(subst =, ,$=)),$(wordlist 3,9,$(subst =, ,$=))))
option = $(call for,$(or $(3),$@),$(if $(call given,$(2)),--$(1)=$(call given,$(2))))
for = $(if $(filter $(1),$@),$(2))
flag = $(if $(call given,$(2)),--$(1))
last = $(if $(call given,$(1)),-- $(call given,$(1)))

# Run goals in order, so that make -j defconfig-lenet5 train works.
.NOTPARALLEL:
.SUFFIXES:
MAKEFLAGS += --no-builtin-rules

all: train

# Configuration
menuconfig nconfig guiconfig xconfig config oldconfig olddefconfig syncconfig listnewconfig helpnewconfig \
alldefconfig allnoconfig allyesconfig allmodconfig tinyconfig randconfig \
update-defconfigs list-defconfigs kconfig-docs kconfig-lint: ready
	$(KCONF) $@
savedefconfig: ready
	$(KCONF) $@ $(call options,name=DEFCONFIG) $(call last,FILE)
checkconfig: ready
	$(KCONF) $@ $(call last,FILE)
setconfig: ready
	$(KCONF) $@ $(call last,SET)
diffconfig: ready
	$(KCONF) $@ $(if $(call given,A),-a=$(call given,A)) $(if $(call given,B),-b=$(call given,B))
explain: ready; $(KCONF) $@ $(call last,SYM)
searchconfig: ready
	$(KCONF) $@ $(call last,Q)

strict = $(call flag,strict,STRICT)
on_top = $(call options,fragments=FRAGMENT) $(strict)
defconfig: ready
	$(KCONF) defconfig $(on_top) $(call last,DEFCONFIG)
mergeconfig: ready
	$(KCONF) merge $(on_top)

# Shells complete static rules. Pattern rules handle A+B and wrong names, but match no slash: the script reports that.
NAMES := $(filter-out fragments sweeps %~,$(notdir $(wildcard defconfigs/*)))
SLASHED := $(foreach =,$(MAKECMDGOALS),$(if $(findstring /,$=),$=))
$(addprefix defconfig-,$(NAMES)) $(filter defconfig-%,$(SLASHED)): defconfig-%: ready
	$(KCONF) defconfig $(on_top) $(call quote,$*)
$(addsuffix _defconfig,$(NAMES)): %_defconfig: ready
	$(KCONF) defconfig $(on_top) $(call quote,$*)
defconfig-% %_defconfig: ready
	$(KCONF) defconfig $(on_top) $(call quote,$*)
$(addsuffix .config,$(filter-out %~,$(notdir $(wildcard defconfigs/fragments/*)))): %.config: ready
	$(KCONF) merge $(strict) $(call quote,$*)
%.config: ready
	$(KCONF) merge $(strict) $(call quote,$*)

# Training
train probe plan preflight data-check: configured ready
	$(TRAIN) $@ $(call options,gpu=GPU=plan price=PRICE=plan out=OUT=data-check) $(call for,plan preflight,$(call flag,json,JSON))
fits: ready
	$(RUN_PY) -m scripts.fits $(call options,model=MODEL gpu=GPU seq=SEQ lora=LORA precision=PRECISION checkpoint=CHECKPOINT target=TARGET price=PRICE out=OUT)
profile: configured ready
	$(TRAIN) $@ $(call options,steps=STEPS) --out=$(or $(call given,OUT),$(call quote,$(or $(O),build)/profile))
# A stored run has its own configuration.
resume rerun eval sample predict export report: ready
	$(TRAIN) $@ $(call for,eval sample predict export,$(call flag,best,BEST)) $(call options,prompt=PROMPT=sample \
		$(addsuffix =sample=predict,temperature=TEMPERATURE top-k=TOP_K seed=SEED tokens=TOKENS) input=INPUT=predict \
		top=TOP=predict $(addsuffix =export,format=FORMAT merge=MERGE directory=DIRECTORY) out=OUT=predict=report) $(call last,RUN)
compare: ready
	$(RUN_PY) -m scripts.compare --runs $(call quote,$(RUN_FOLDER)) $(call options,where=WHERE out=OUT) $(call last,RUNS)
runs: ready
	$(RUN_PY) -m scripts.runs --runs $(call quote,$(RUN_FOLDER)) $(call options,where=WHERE sort=SORT limit=LIMIT) $(call flag,json,JSON)
watch: ready; $(RUN_PY) -m scripts.watch --runs $(call quote,$(RUN_FOLDER))
tag: ready
	$(RUN_PY) -m scripts.runs --runs $(call quote,$(RUN_FOLDER)) --tag=$(or $(call given,TAG),'') $(call last,RUN)
plots: ready; $(RUN_PY) -m scripts.plots --runs $(call quote,$(RUN_FOLDER)) $(call last,RUN)
curve: ready
	$(RUN_PY) -m scripts.curve --runs $(call quote,$(RUN_FOLDER)) \
		$(call options,column=COLUMN threshold=THRESHOLD reference=REFERENCE tolerance=TOLERANCE out=OUT) $(call last,RUN)
# plugin: looped
experiment: configured ready
	$(RUN_PY) -m scripts.eqprop $(call options,experiment=EXP) $(call flag,quick,QUICK) $(call options,out=OUT)
# /plugin
launch-print sbatch submit emit: configured ready
	$(CLUSTER) $(@:launch-%=%) $(call options,to=TO image=IMAGE storage=STORAGE accelerator=ACCELERATOR)
elastic-check elastic-demo: ready
	$(RUN_PY) -m scripts.elastic $(@:elastic-%=%) $(call for,elastic-check,$(call given,GPU))
bench: $(if $(call given,PEERS),,configured) ready
	$(RUN_PY) -m scripts.bench.throughput $(call flag,peers,PEERS) $(call options,out=OUT)
scaling scaling-plan scaling-run scaling-fit scaling-plot scaling-report: ready
	$(RUN_PY) -m scripts.scaling $(if $(filter scaling,$@),all,$(@:scaling-%=%)) $(call flag,quick,QUICK) \
		$(call options,shapes=SHAPES budget=BUDGET compare=COMPARE corpus=CORPUS epochs=EPOCHS batch=BATCH device=DEVICE out=OUT)
sweep: ready
	$(RUN_PY) -m scripts.sweep --runs $(call quote,$(RUN_FOLDER)) \
		$(call options,jobs=JOBS out=OUT confirm=CONFIRM first-seed=FIRST_SEED) $(call given,SWEEP)
ab: ready
	$(RUN_PY) -m scripts.ab --runs $(call quote,$(RUN_FOLDER)) $(call options,a=A b=B seeds=SEEDS first-seed=FIRST_SEED metric=METRIC jobs=JOBS out=OUT)
sweep-yaml: configured ready; $(RUN_PY) -m scripts.sweep --yaml $(call options,out=OUT)
fetch: ready; $(RUN_PY) -m scripts.fetch $(call options,repo=REPO revision=REVISION directory=DIRECTORY)

# train-NAME uses a directory of its own, unless O= or KCONFIG_CONFIG= names another one.
named_out = $(or $(O),build/$*)
named_config = KCONFIG_CONFIG=$(call quote,$(if $(config_is_named),$(KCONFIG_CONFIG),$(named_out)/.config))
define train_named
$(quiet)$(named_config) $(PY) scripts/kconf.py defconfig $(call quote,$*)
$(quiet)$(named_config) $(PY) -m train --runs $(call quote,$(named_out)/runs) $(verbose) train
endef
$(addprefix train-,$(NAMES)) $(filter train-%,$(SLASHED)): train-%: ready
	$(train_named)
train-%: ready
	$(train_named)

# Development
test test-fast test-long: ready-dev
	$(RUN_PY) -m pytest -n 2 --dist worksteal $(if $(filter test-fast,$@),-m "not slow" --ignore=tests/e2e) $(if $(filter test-long,$@),-m long)
test-coverage: ready-dev
	$(RUN_PY) -m coverage run -m pytest -n 2 --dist worksteal
	$(RUN_PY) -m coverage combine --quiet
	$(RUN_PY) -m coverage report
test-light: ready; $(RUN_PY) -m scripts.light_matrix
test-deletion test-faults: ready-dev
	$(RUN_PY) -m scripts.$(@:test-%=%) $(call for,test-deletion,$(call given,PLUGIN))
test-pages: ready-dev
	$(RUN_PY) -m pytest -rs tests/pages
test-extras: ready-dev
	$(quiet)tests/extras/run.sh $(call quote,$(PY))
test-slurm: ready-dev
	$(RUN_PY) -m pytest -rs -m slurm tests/e2e/test_slurm.py
check: ready-dev
	$(RUN_PY) -m ruff check
	$(RUN_PY) -m ruff format --check
	$(RUN_PY) -m mypy
new-model new-task new-data: ready
	$(RUN_PY) -m scripts.scaffold $(@:new-%=%) $(or $(call given,NAME),'') $(call for,new-model,$(call given,TASK))
	$(keep_external)

# Housekeeping
clean: always
	$(quiet)rm -rf .mypy_cache .ruff_cache .pytest_cache .hypothesis
	$(quiet)find anneal lib models train scripts tests -name __pycache__ -prune -exec rm -rf {} +
idle: always; $(quiet)scripts/idle.sh $(call quote,$(RUN_FOLDER)) $(call quote,$(PY)) $(call quote,$(PYTHON))
# Only remove a virtual environment that this Makefile created.
mrproper: idle clean
	$(quiet)rm -f $(call quote,$(KCONFIG_CONFIG)) $(call quote,$(KCONFIG_CONFIG).old) $(call quote,$(or $(O),.)/.external)
	$(quiet)rm -rf $(call quote,$(KCONFIG_OUTPUT)/include/config)
	$(quiet)if [ -e $(call quote,$(VENV)/.created) ] || [ -e $(call quote,$(VENV)/.creating) ]; then rm -rf $(call quote,$(VENV)); fi
distclean: mrproper; $(quiet)rm -rf $(if $(O),$(call quote,$(O)/runs),runs build)
data-clean: idle; $(quiet)rm -rf data
printvars: always
	@PYTHON=$(call quote,$(PYTHON)) VENV=$(call quote,$(VENV)) awk -v mode=printvars -f scripts/targets.awk scripts/targets
# It runs before there is an environment.
doctor: always
	$(quiet)$(PYTHON) scripts/doctor.py --venv=$(call quote,$(VENV)) --runs=$(call quote,$(RUN_FOLDER)) --make=$(MAKE_VERSION) \
		$(call flag,json,JSON)
help help-all: always
	@awk -v mode=$@ -f scripts/targets.awk scripts/targets

# Make updates its own file before any goal, also with -n, so goals and variables are checked there. The targets that
# always run depend on it, so that make -k stops after a refusal.
$(sort Makefile $(lastword $(MAKEFILE_LIST))): force
	@scripts/check_goals.sh $(call quote,$(PY)) $(call quote,$(GOALS)) '$(of_environment)'
always: Makefile
configured: always
	@if [ ! -e $(call quote,$(KCONFIG_CONFIG)) ]; then printf '%s\n' \
	      'error: there is no configuration'$(if $(O),' in '$(call quote,$(O)))'; create one with$(if $(O), the same O=,):' \
	      '  make defconfig-lenet5   start from one that is known to work (make list-defconfigs)' \
	      '  make menuconfig         choose in a menu' \
	      '  make alldefconfig       take every default' >&2; exit 2; fi

# The Python environment: created when the lock changes or its interpreter is gone, or checked against an explicit
# PYTHON. With VENV= empty it is checked and never changed.
BOOTSTRAP = $(quiet)scripts/bootstrap.sh $(call quote,$(VENV)) $(call quote,$(PYTHON))
SAME := $(if $(filter command,$(origin PYTHON)),--same-python)
ifeq ($(VENV),)
ready: always
	$(BOOTSTRAP) requirements.txt
	$(if $(filter new-%,$(GOALS)),,$(keep_external))
ready-dev: ready
	$(BOOTSTRAP) requirements-dev.txt
else
ready: always $(VENV)/.stamp
	$(if $(filter new-%,$(GOALS)),,$(keep_external))
ready-dev: ready $(VENV)/.stamp-dev
$(VENV)/.stamp: requirements.lock $(if $(SAME)$(if $(wildcard $(VENV)/bin/python),,gone),always) | always
	$(BOOTSTRAP) requirements.txt $(SAME)
$(VENV)/.stamp-dev: requirements-dev.lock $(VENV)/.stamp
	$(BOOTSTRAP) requirements-dev.txt $(SAME)
endif

.PHONY: always force configured idle ready ready-dev
