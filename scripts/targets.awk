# Reads the table of targets, scripts/targets.
#
#     awk -v mode=help|help-all|targets|variables|printvars|check -f scripts/targets.awk scripts/targets
#
# check judges the goals $KCONFIG_MAKE_GOALS and the variables that $KCONFIG_MAKE_VARIABLES names. It prints the goals
# that are no targets, then, on a second line, what is wrong; 2 is its status, or 3 where Python may know more.

BEGIN { FS = " *[|] *" }
/^#/ || /^$/ { next }
/^\[/ { title[rows + 1] = substr($0, 2, length($0) - 2); next }
{
	targets = split($1, names, " ")
	for (i = 1; i <= targets; i++) add(names[i], $2, $3)
	if ($4 != "") goal_of[row[names[1]]] = $4
}

END {
	if (mode == "help") short_help()
	if (mode == "help-all") help()
	if (mode == "targets") for (i = 1; i <= rows; i++) if (help_of[i] != "" && target[i] !~ /NAME|FRAGMENT/) print target[i]
	if (mode == "variables") for (i = 1; i <= known; i++) print variable[i]
	if (mode == "printvars") for (i = 1; i <= known; i++) print variable[i] "=" value_of(variable[i])
	if (mode == "check") check()
}

function add(name, variables, text,    count, words, i, parts) {
	row[name] = ++rows
	target[rows] = name
	variables_of[rows] = variables
	help_of[rows] = text
	count = split(variables, words, " ")
	for (i = 1; i <= count; i++) {
		split(words[i], parts, "=")
		takes[name, parts[1]] = 1
		if (parts[1] !~ /\*/ && !(parts[1] in form)) variable[++known] = parts[1]
		form[parts[1]] = parts[2]
	}
}

# Of a target's variables those that its text does not name.
function more(i,    count, words, j, name, shown) {
	count = split(variables_of[i], words, " ")
	for (j = 1; j <= count; j++) {
		name = words[j]
		sub(/=.*/, "=", name)
		sub(/=\*/, "=", words[j])
		if (name != "CONFIG_*" && index(help_of[i], name) == 0) shown = shown " " words[j]
	}
	return shown
}

# Print head and text in lines of at most 100 columns; all but the first are indented.
function wrap(head, text, indent,    count, words, i, line) {
	line = head
	count = split(text, words, " ")
	for (i = 1; i <= count; i++) {
		if (length(line words[i]) >= 100) {
			print line
			line = sprintf("%*s", indent - 1, "")
		}
		line = line " " words[i]
	}
	print line
}

# Variables that the text does not name go behind it, or, without room, on a line of their own.
function show(i, variables,    head) {
	head = sprintf("  %-17s", target[i])
	if (variables != "" && length(head " " help_of[i] ";" variables) <= 100) {
		wrap(head, help_of[i] ";" variables, 20)
		return
	}
	wrap(head, help_of[i], 20)
	if (variables != "") wrap(sprintf("%19s", ""), variables, 20)
}

function short_help(    count, goals, g, i) {
	count = split("Start Train Look Decide Share Scale", goals, " ")
	for (g = 1; g <= count; g++) {
		print goals[g]
		for (i = 1; i <= rows; i++) if (goal_of[i] == goals[g]) show(i, "")
	}
	print "\nmake help-all shows the other targets and variables, make explain SYM=NAME an option."
}

function help(    i) {
	for (i = 1; i <= rows; i++) {
		if (i in title) printf "\n%s\n", title[i]
		if (help_of[i] != "") show(i, more(i))
	}
	print ""
	print "All targets take" more(row["*"]) "."
	print "Those that configure or train take also CONFIG_NAME=value, for one run without touching .config."
	print "EXTERNAL=DIR adds models, data and configurations. V=1 shows the commands, where values come from,"
	print "and the whole plan."
}

function value_of(name,    value) {
	value = ENVIRON[name]
	gsub(/\n/, " ", value)
	return value
}

# The target of the table that a goal is; "" where there is none.
function target_of(goal,    i, name, front, back) {
	if (goal in row && goal != "*") return goal
	for (i = 1; i <= rows; i++) {
		name = target[i]
		if (!match(name, /NAME|FRAGMENT/)) continue
		front = substr(name, 1, RSTART - 1)
		back = substr(name, RSTART + RLENGTH)
		if (length(goal) > length(front back) && index(goal, front) == 1 &&
		    substr(goal, length(goal) - length(back) + 1) == back) return name
	}
	return ""
}

# Whether it writes the whole configuration anew.
function replaces(goal) { return target_of(goal) ~ /^(defconfig-NAME|NAME_defconfig|defconfig|all[a-z]+config|randconfig|tinyconfig)$/ }

function any_takes(name,    i) {
	for (i = 1; i <= goals; i++) if ((target_of(goal[i]), name) in takes) return 1
	return 0
}

function users_of(name,    i, users) {
	for (i = 1; i <= rows; i++) if ((target[i], name) in takes) users = users " " target[i]
	return substr(users, 2)
}

function refuse(error) { print "\n" error; exit 2 }
function ask(strange, error) { print strange "\n" error; exit 3 }

function check(    i, names, given, strange, name, key, whole) {
	goals = split(ENVIRON["KCONFIG_MAKE_GOALS"], goal, " ")
	names = split(ENVIRON["KCONFIG_MAKE_VARIABLES"], given, " ")
	for (i = 1; i <= goals; i++) {
		if (goal[i] ~ /^(\.DEFAULT|\.PHONY|:)$/) exit 0 # a program that completes words asks for the database
		if (goal[i] in form || goal[i] ~ /^CONFIG_/) refuse(goal[i] " is a variable; write " goal[i] "=value")
		if (target_of(goal[i]) == "") strange = strange " " goal[i]
	}
	if (split(strange, names_of_none, " "))
		ask(substr(strange, 2), names_of_none[1] " is not a target; make help-all shows what there is")
	for (i = 1; i <= names; i++) if (!(given[i] in form) && given[i] !~ /^CONFIG_/)
		ask("", given[i] " is not a variable of this Makefile; a symbol of the configuration is given as CONFIG_NAME=value")
	# A shipped configuration is all that it is, as in the kernel.
	for (i = 1; i <= names; i++) if (given[i] == "DEFCONFIG" && ENVIRON["DEFCONFIG"] != "") delete takes["defconfig", "KCONFIG_ALLCONFIG"]
	for (i = 1; i <= names; i++) {
		name = given[i]
		key = name ~ /^CONFIG_/ ? "CONFIG_*" : name
		if (!(("*", key) in takes) && !any_takes(key)) refuse(unused(name, key))
		if (key == name) check_value(name, ENVIRON[name] "")
	}
	for (i = 1; i <= goals; i++) if (replaces(goal[i])) {
		if (whole != "" && goal[i] != whole)
			refuse(goal[i] " would replace what " whole " has written; name one of them; NAME+FRAGMENT adds a fragment")
		whole = goal[i]
	}
	# What loads the configuration checks the names of options itself; for other goals, which may come before, it is done now.
	for (i = 1; i <= names; i++) if (given[i] ~ /^CONFIG_/)
		for (name in goal) if (!((target_of(goal[name]), "CONFIG_*") in takes)) ask("", "")
}

function unused(name, key,    hint, users) {
	users = key == "CONFIG_*" ? "targets that configure or train, such as setconfig, plan, train" : users_of(key)
	if (key == "CONFIG_*" && any_takes("RUN")) hint = "; a stored run keeps its configuration"
	if (key == "CONFIG_*" && any_takes("A")) hint = "; write what changes as a fragment: docs/tutorials/compare.md"
	for (i = 1; i <= goals; i++) if (goal[i] == "resume" && name == "CONFIG_NUM_DEVICES") hint = hint "; make train resumes on other devices"
	return name " is not used by make " ENVIRON["KCONFIG_MAKE_GOALS"] "; it is for: " users hint
}

function check_value(name, value) {
	# Python's argparse takes it for the end of the options, also behind an equals sign.
	if (value == "--") refuse(name "=-- is no value; two dashes alone end the options of a program")
	if (form[name] == "" && value == "") refuse(name "= is empty; give it a value, or leave it out")
	if (form[name] ~ /^[0-9]/ && value != "" && index("," form[name] ",", "," value ",") == 0)
		refuse(name == "V" ? "V is 1 to show commands and origins, or 0" : name " is 1, or left out")
}
