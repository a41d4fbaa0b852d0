// Prints as JSON what Speedscope's own parser makes of a file: node speedscope.js RELEASE_DIRECTORY FILE
const fs = require('fs'), path = require('path'), vm = require('vm');
const [directory, file] = process.argv.slice(2);
const bundle = name => fs.readdirSync(directory).find(each => each.startsWith(name + '.') && each.endsWith('.js'));
global.window = global;
global.self = global;
// The page's demangler needs a browser, and the parser does without it.
process.on('uncaughtException', () => {});
process.on('unhandledRejection', () => {});
for (const name of ['speedscope', 'import']) {
  const text = fs.readFileSync(path.join(directory, bundle(name)), 'utf8');
  // Only the modules of the page, without its start.
  vm.runInThisContext(text.replace(/\{\},\[[^\]]*\], null\)\s*(\/\/.*)?\s*$/, '{},[],null)'));
}
const modules = parcelRequire.modules;
const id = Object.keys(modules).find(each => modules[each][0].toString().includes('importProfileGroupFromText'));
console.log = () => {};
parcelRequire(id).importProfileGroupFromText(path.basename(file), fs.readFileSync(file, 'utf8')).then(group => {
  const found = group.profiles.map(profile => {
    const calls = [];
    profile.forEachCall(
      (node, value) => calls.push(['open', node.frame.name, value]),
      (node, value) => calls.push(['close', node.frame.name, value]));
    return {name: profile.getName(), unit: profile.getWeightUnit(), calls};
  });
  process.stdout.write(JSON.stringify(found), () => process.exit(0));
});
